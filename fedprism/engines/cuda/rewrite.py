"""What a step is rewritten to for a compiler: convolutions of small batches become matrix products of the same
parameters; pooling, batch norm and losses are written out. A compiler can fuse those with what is around them, and
fewer kernels are what makes small models fast."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

SMALL = 3_000_000  # numbers of a convolution's unfolded input up to which it becomes a matrix product
WINDOW = 25  # pixels of a pooling's window up to which each is looked at by itself
LARGE = 4_000_000  # numbers of a matrix from which on a product with it is left to cuBLAS

RELUS = {functional.relu, torch.relu, torch.Tensor.relu}
PRODUCTS = {torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__}

PLAIN = {  # cross-entropy without settings
    "weight": None,
    "size_average": None,
    "ignore_index": -100,
    "reduce": None,
    "reduction": "mean",
    "label_smoothing": 0.0,
}


class Rewritten(TorchFunctionMode):
    """Within: convolutions of small batches are matrix products; pooling, batch norm and losses are written out."""

    def __init__(self, labels: Tensor) -> None:
        super().__init__()
        self.labels = labels

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.conv2d:
            product = _conv2d(*args, **kwargs)
            if product is not None:
                return product
        if func in RELUS and args[0].ndim == 4 and args[0].stride(1) == 1:
            # As rows of a matrix, which is how a product before it comes: the compiler then makes one kernel of both.
            x = args[0].permute(0, 2, 3, 1)
            return x.reshape(-1, x.shape[-1]).relu().view(x.shape).permute(0, 3, 1, 2)
        if func is functional.max_pool2d and (pooled := _max_pool2d(*args, **kwargs)) is not None:
            return pooled
        if func is functional.batch_norm:
            return _batch_norm(*args, **kwargs)
        if func is functional.cross_entropy and args[1] is self.labels and kwargs == PLAIN:
            return _cross_entropy(*args)
        if func in PRODUCTS and args[0].dtype == torch.float64 and args[0].ndim == args[1].ndim == 2:
            return (args[0].unsqueeze(1) * args[1].T.unsqueeze(0)).sum(2)
        return func(*args, **kwargs)


def _conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    """A convolution as a matrix product; None where it is better left as it is."""
    if isinstance(padding, str) or groups != 1 or {*_pair(stride), *_pair(dilation)} != {1}:
        return None
    if not weight.is_contiguous():  # channels last, which cuDNN takes as they are
        return None
    (high, wide), kernel = _pair(padding), weight.shape[2:]
    rows, columns = x.shape[2] + 2 * high - kernel[0] + 1, x.shape[3] + 2 * wide - kernel[1] + 1
    if not weight.numel() <= len(x) * rows * columns * weight[0].numel() <= SMALL:
        return None
    bias = weight.new_zeros(len(weight)) if bias is None else bias
    if torch.is_autocast_enabled(x.device.type):  # as a convolution: its backward runs in the same precision
        x, weight, bias = (each.to(torch.get_autocast_dtype(x.device.type)) for each in (x, weight, bias))
    product: Tensor = Product.apply(x, weight, bias, (high, wide))  # type: ignore[no-untyped-call]
    return product


class Product(torch.autograd.Function):
    """Unfold, multiply; and back without a scatter.

    A window's numbers stand in the order of the input's memory, so that neighbours are read together: channels last
    behind another product, whose result has them so; channels first in images, and the weights are then a matrix as
    they are.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, padding: tuple[int, int]) -> Tensor:
        out, _, high, wide = weight.shape
        ctx.padding, ctx.shape, ctx.window, ctx.last = padding, x.shape, (high, wide), x.stride(1) == 1
        x = _whole(x)
        padded = functional.pad(x, (padding[1], padding[1], padding[0], padding[0])) if any(padding) else x
        windows = padded.unfold(2, high, 1).unfold(3, wide, 1)  # [batch, channels, rows, columns, high, wide]
        n, c, rows, columns = windows.shape[:4]
        windows, weight = (
            (windows.permute(0, 2, 3, 4, 5, 1), weight.permute(0, 2, 3, 1))
            if ctx.last
            else (windows.permute(0, 2, 3, 1, 4, 5), weight)
        )
        unfolded, matrix = windows.reshape(n * rows * columns, high * wide * c), weight.reshape(out, -1)
        ctx.save_for_backward(unfolded, matrix)
        return torch.addmm(bias, unfolded, matrix.T).view(n, rows, columns, out).permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        unfolded, matrix = ctx.saved_tensors
        (high, wide), c = ctx.window, ctx.shape[1]
        n, out, rows, columns = grads[0].shape
        window, order = ((high, wide, c), (2, 0, 1)) if ctx.last else ((c, high, wide), (0, 1, 2))
        grad = grads[0].permute(0, 2, 3, 1).reshape(n * rows * columns, out)
        of_weight = of_bias = of_x = None
        if ctx.needs_input_grad[1]:
            of_weight = (grad.T @ unfolded).view(out, *window).permute(0, *(1 + place for place in order))
        if ctx.needs_input_grad[2]:
            of_bias = grad.sum(0)
        if ctx.needs_input_grad[0]:
            # Each pixel takes part in high x wide windows: the sum over them, each shifted to its place.
            parts = (grad @ matrix).view(n, rows, columns, *window).permute(0, *(3 + place for place in order), 1, 2)
            shifted = [
                functional.pad(parts[:, :, i, j], (j, wide - 1 - j, i, high - 1 - i))
                for i in range(high)
                for j in range(wide)
            ]
            of_x = sum(shifted[1:], shifted[0])
            (top, left), (_, _, height, width) = ctx.padding, ctx.shape
            of_x = of_x[:, :, top : top + height, left : left + width]
        return of_x, of_weight, of_bias, None


def _whole(x: Tensor) -> Tensor:
    """The same, but the compiler has to store it: it would compute again for each of its uses what led to it.

    Not a part of something larger, such as a slice: the compiler reads those at the wrong places.
    """
    if x.storage_offset() or x.untyped_storage().nbytes() != x.numel() * x.element_size():
        return x
    return x.as_strided(x.shape, x.stride())


def _max_pool2d(
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | None:
    """Pooling without indices of pixels; None where it is better left as it is."""
    kernel, stride = _pair(kernel_size), _pair(stride or kernel_size)
    if x.ndim != 4 or ceil_mode or return_indices or (*_pair(padding), *_pair(dilation)) != (0, 0, 1, 1):
        return None
    if kernel[0] * kernel[1] > WINDOW:
        return None
    pooled: Tensor = Maxima.apply(x, kernel, stride)  # type: ignore[no-untyped-call]
    return pooled


class Maxima(torch.autograd.Function):
    """The largest of each window; and back without a scatter, for which a compiler needs two more kernels.

    What is kept is which pixel of its window was the largest, the first one if several were.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: tuple[int, int], stride: tuple[int, int]) -> Tensor:
        sides = zip(x.shape[2:], kernel, stride, strict=True)
        rows, columns = ([range(i, side - wide + i + 1, step) for i in range(wide)] for side, wide, step in sides)
        pixels = [x[:, :, r.start : r.stop : r.step, c.start : c.stop : c.step] for r in rows for c in columns]
        largest, which = pixels[0], torch.zeros_like(pixels[0], dtype=torch.int8)
        for place, pixel in enumerate(pixels[1:], start=1):
            larger = (pixel > largest) | pixel.isnan()
            largest, which = torch.where(larger, pixel, largest), torch.where(larger, place, which)
        ctx.save_for_backward(_whole(which))
        ctx.kernel, ctx.stride, ctx.sides, ctx.last = kernel, stride, x.shape[2:], x.stride(1) == 1
        return largest

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Each pixel asks the windows that it is in, two a side if they overlap, whether it was the largest there."""
        (which,), (grad,), kernel, stride, sizes = ctx.saved_tensors, grads, ctx.kernel, ctx.stride, grads[0].shape[2:]
        rows, columns = (torch.arange(side, device=grad.device) for side in ctx.sides)
        rows = rows[:, None]
        every: tuple[slice, ...] = (slice(None),) * 2
        if ctx.last:  # what is computed is stored in the order of its dimensions
            which, grad, every = which.permute(0, 2, 3, 1), grad.permute(0, 2, 3, 1), every[1:]
        parts = []
        for up in range(-(-kernel[0] // stride[0])):
            for left in range(-(-kernel[1] // stride[1])):
                r, c = rows // stride[0] - up, columns // stride[1] - left
                place = (rows - r * stride[0]) * kernel[1] + columns - c * stride[1]
                inside = (rows - r * stride[0] < kernel[0]) & (columns - c * stride[1] < kernel[1])
                there = inside & (r >= 0) & (r < sizes[0]) & (c >= 0) & (c < sizes[1])
                window = (*every, r.clamp(0, sizes[0] - 1), c.clamp(0, sizes[1] - 1))
                place, there = (place[..., None], there[..., None]) if ctx.last else (place, there)
                parts.append(torch.where(there & (which[window] == place), grad[window], 0))
        total = sum(parts[1:], parts[0])
        return total.permute(0, 3, 1, 2) if ctx.last else total, None, None


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


def _batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Batch norm by its definition."""
    over = [0, *range(2, x.ndim)]
    shape = [1, -1] + [1] * (x.ndim - 2)
    if training:
        var, mean = torch.var_mean(x, over, correction=0)
        if running_mean is not None and running_var is not None:
            count = x.numel() / x.shape[1]
            with torch.no_grad():
                running_mean.mul_(1 - momentum).add_(mean.detach(), alpha=momentum)
                running_var.mul_(1 - momentum).add_(var.detach(), alpha=momentum * count / (count - 1))
    else:
        assert running_mean is not None
        assert running_var is not None
        mean, var = running_mean, running_var
    scale = (var + eps).rsqrt() * (1.0 if weight is None else weight)
    shift = (0.0 if bias is None else bias) - mean * scale
    return x * scale.view(shape) + shift.view(shape)


def _cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """Of the labels of a batch, which are classes: PyTorch's counts those first that are to be left out."""
    right = torch.arange(scores.shape[1], device=scores.device) == labels.unsqueeze(1)
    return -torch.where(right, scores.log_softmax(1), 0).sum(1).mean()


# --- in a traced graph -----------------------------------------------------------------------------------------------


def one_product_at_a_time(graph: torch.fx.GraphModule) -> None:
    """The sum of two matrix products becomes a product that is added to the other.

    The compiler has a kernel of its own for such a sum, but not where the products are over less than 17 numbers: the
    gradient of a head that scores a small batch twice could not be compiled.
    """
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten.add.Tensor and len(node.args) == 2 and not node.kwargs:
            one, two = (_untransposed(each) for each in node.args)
            if one is not None and two is not None and one.meta["val"].shape == two.meta["val"].shape:
                node.target, node.args = torch.ops.aten.addmm.default, (one, *two.args)
    graph.recompile()


def _untransposed(node: Any) -> torch.fx.Node | None:
    """The product that a node is, or is but for being transposed twice."""
    transposed = torch.ops.aten.t.default
    while getattr(node, "target", None) is transposed and getattr(node.args[0], "target", None) is transposed:
        node = node.args[0].args[0]
    return node if getattr(node, "target", None) is torch.ops.aten.mm.default else None


@torch.library.custom_op("fedprism::product", mutates_args=(), schema="(Tensor a, Tensor b) -> Tensor")
def product(a: Tensor, b: Tensor) -> Tensor:
    """A matrix product that the compiler does not look into."""
    return a @ b


@product.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def leave_large_products(graph: torch.fx.GraphModule) -> None:
    """Products with a large matrix, such as a wide layer's weights, become cuBLAS's.

    They take as long as the matrix takes to be read. cuBLAS shares that out along the sum, too, which Triton's do not:
    of a small batch's product with a large matrix they read at a third of the speed.
    """
    for node in graph.graph.nodes:
        if node.target not in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) or node.kwargs:
            continue
        added, factors = node.args[:-2], node.args[-2:]
        if max(each.meta["val"].numel() for each in factors) >= LARGE:
            if added:
                with graph.graph.inserting_before(node):
                    plain = graph.graph.call_function(torch.ops.fedprism.product.default, factors)
                node.target, node.args = torch.ops.aten.add.Tensor, (plain, *added)
            else:
                node.target = torch.ops.fedprism.product.default
    graph.recompile()
