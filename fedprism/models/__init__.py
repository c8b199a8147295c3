"""Models: each is a feature extractor (`body`) and a classifier (`head`); one family per file."""

from fedprism.models.alexnet_bn import AlexNetBN
from fedprism.models.base import MODELS, Arch, Block, Family, Model, fresh, initialise, last_linear
from fedprism.models.choose import architectures, named_arch
from fedprism.models.cnn4 import CNN4
from fedprism.models.convnet_bn import ConvNetBN
from fedprism.models.digit6 import Digit6
from fedprism.models.fasttext import FastText
from fedprism.models.lenet_bn import LeNetBN
from fedprism.models.mlp import MLP
from fedprism.models.outside import Timm, Torchvision
from fedprism.models.resnet import ResNet18, ResNet34, ResNet50
from fedprism.models.vit import ViTB16, ViTB32, ViTTiny

__all__ = ["CNN4", "MLP", "MODELS", "AlexNetBN", "Arch", "Block", "ConvNetBN", "Digit6", "Family", "FastText"]
__all__ += ["LeNetBN", "Model", "ResNet18", "ResNet34", "ResNet50", "Timm", "Torchvision"]
__all__ += ["ViTB16", "ViTB32", "ViTTiny"]
__all__ += ["architectures", "fresh", "initialise", "last_linear", "named_arch"]
