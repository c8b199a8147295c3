"""Addresses, licences and file names of the published datasets.

Addresses and checksums come from published lists, which each entry names. A file without a published checksum is
`unverified`: its checksum is recorded at the first download (`<root>/checksums.json`), and later downloads must match.
The files of a source are in `<root>/<source>/` under their published names, archives unpacked in place. Some sources
also have a compact form (`packed.py`) in the root itself; if it is there, nothing is downloaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from rich.console import Console
from rich.filesize import decimal

from fedprism.data.archives import MAX_FILES, BadArchive, half_unpacked, remove_leftovers, unpack
from fedprism.data.download import MAX_BYTES, Checksums, NotFetched, byte_bar, digest, fetch, writing
from fedprism.errors import DataError, unknown

Ways = tuple[str, ...]  # alternative patterns, one of which must match


@dataclass(frozen=True)
class SourceFile:
    """One published file."""

    name: str
    address: str  # URL of the file, or of the page to open if `by_hand`
    checksum: str | None = None  # md5:... or sha256:...; None: not published
    size: int | None = None
    checksum_from: str = ""  # who published the checksum
    address_from: str = ""  # who published the address, if not `checksum_from`
    unpack: bool = False
    keep: tuple[str, ...] = ()  # unpack only members that match one of these patterns
    gives: tuple[Ways, ...] = ()  # what readers then find in the folder; empty: the file itself
    mirrors: tuple[str, ...] = ()
    by_hand: bool = False  # only a browser can download it

    @property
    def expects(self) -> tuple[Ways, ...]:
        return self.gives or ((self.name,),)


@dataclass(frozen=True)
class Source:
    """The files published under one name, in one folder."""

    name: str
    title: str
    files: tuple[SourceFile, ...]
    licence: str
    cite: str
    note: str = ""
    max_bytes: int = MAX_BYTES  # of an unpacked archive, or of a file of unknown size
    max_files: int = MAX_FILES

    @property
    def folder(self) -> str:
        return self.name

    @property
    def expects(self) -> tuple[Ways, ...]:
        """What readers look for in the folder; one pattern per entry must match."""
        return tuple(ways for file in self.files for ways in file.expects)

    @property
    def size(self) -> int | None:
        """Bytes to download; None: not published."""
        sizes = [file.size for file in self.files]
        return None if None in sizes else sum(size or 0 for size in sizes)

    def lacks(self, root: Path) -> list[str]:
        """The first pattern of each missing entry."""
        return [ways[0] for ways in self.expects if not _found(root / self.folder, ways)]

    def compact(self, root: Path) -> list[Path]:
        """The files of the compact form, if all of them are there."""
        with looking():
            files = [root / name for name in PACKED.get(self.name, ())]
            return files if all(file.is_file() for file in files) else []


def visible(folder: Path, pattern: str) -> list[Path]:
    """The paths in a folder that match a pattern, except hidden ones, such as an archive being unpacked."""
    with looking():
        found = sorted(folder.glob(pattern))
        return [path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)]


def _found(folder: Path, ways: Ways) -> bool:
    return any(visible(folder, way) for way in ways)


@contextmanager
def looking() -> Iterator[None]:
    """Turn an `OSError`, such as a folder without read permission, into a clear error."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{error.filename or 'the data'} cannot be read: {error.strerror or error}. Make it readable, or name "
            "another folder with data.root or $FEDPRISM_DATA."
        ) from error


# --- the sources ------------------------------------------------------------------------------------------------------

_TFDS = "tensorflow-datasets 4.9.10"
_MILA = "GitHub datasets-mila/datasets--domainnet, md5sums (sizes: its git-annex keys)"
_TLLIB = "GitHub thuml/Transfer-Learning-Library, tllib/vision/datasets/pacs.py"
_PYKALE = "pykale, kale/loaddata/image_access.py"
_NO_LICENCE = "No licence is stated by those who publish it."

_OFFICE = (  # Office-31's names of the ten classes, then other spellings
    *("back_pack", "bike", "calculator", "headphones", "keyboard"),
    *("laptop_computer", "monitor", "mouse", "mug", "projector"),
    *("*backpack", "*touring-bike", "*head-phones", "*computer-keyboard"),
    *("*laptop", "*laptop-101", "*computer-monitor", "*computer-mouse", "*coffee-mug", "*video-projector"),
)
_DOMAINNET = (
    *("bird", "feather", "headphones", "ice_cream", "teapot"),
    *("tiger", "whale", "windmill", "wine_glass", "zebra"),
)


def _mnist(name: str, size: int, sha256: str) -> SourceFile:
    return SourceFile(
        name,
        f"https://storage.googleapis.com/cvdf-datasets/mnist/{name}",
        f"sha256:{sha256}",
        size,
        f"{_TFDS}, url_checksums/mnist.txt",
        gives=((name, name.removesuffix(".gz")),),
        mirrors=(f"https://ossci-datasets.s3.amazonaws.com/mnist/{name}",),  # torchvision's
    )


def _svhn(name: str, size: int, sha256: str) -> SourceFile:
    where = f"{_TFDS}, datasets/svhn_cropped/checksums.tsv"
    return SourceFile(name, f"http://ufldl.stanford.edu/housenumbers/{name}", f"sha256:{sha256}", size, where)


def _usps(name: str, md5: str) -> SourceFile:
    address = f"https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass/{name}"
    return SourceFile(name, address, f"md5:{md5}", None, "torchvision 0.29.2, torchvision/datasets/usps.py")


def _agnews(name: str, md5: str) -> SourceFile:
    address = f"https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/{name}"
    return SourceFile(name, address, f"md5:{md5}", None, "torchtext 0.18.0, torchtext/datasets/ag_news.py")


def _office(domain: str) -> SourceFile:
    return SourceFile(
        f"{domain}.zip",
        f"https://github.com/pykale/data/raw/main/images/office/{domain}.zip",
        address_from=_PYKALE,
        unpack=True,
        keep=tuple(f"*/{name}/*" for name in _OFFICE),
        gives=((domain, f"*/{domain}", *(("caltech10", "*/caltech10") if domain == "caltech" else ())),),
    )


def _pacs(domain: str, key: str) -> SourceFile:
    return SourceFile(
        f"{domain}.tgz",
        f"https://cloud.tsinghua.edu.cn/f/{key}/?dl=1",
        address_from=_TLLIB,
        unpack=True,
        gives=((domain, f"*/{domain}"),),
    )


def _domainnet(domain: str, folder: str, size: int, md5: str, *lists: tuple[str, int, str]) -> tuple[SourceFile, ...]:
    base = "http://csr.bu.edu/ftp/visda/2019/multi-source"
    images = SourceFile(
        f"{domain}.zip",
        f"{base}/{folder}{domain}.zip",
        f"md5:{md5}",
        size,
        _MILA,
        unpack=True,
        keep=tuple(f"*/{name}/*" for name in _DOMAINNET),
        gives=((domain, f"*/{domain}"),),
    )
    texts = (
        SourceFile(
            f"{domain}_{part}.txt",
            f"{base}/domainnet/txt/{domain}_{part}.txt",
            f"md5:{list_md5}",
            list_size,
            _MILA,
            gives=((f"{domain}_{part}.txt", f"*/{domain}_{part}.txt"),),
        )
        for part, list_size, list_md5 in lists
    )
    return (images, *texts)


_ALL = (
    Source(
        "mnist",
        "MNIST: handwritten digits, 28x28 grey",
        (
            _mnist(
                "train-images-idx3-ubyte.gz",
                9912422,
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            ),
            _mnist(
                "train-labels-idx1-ubyte.gz", 28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"
            ),
            _mnist(
                "t10k-images-idx3-ubyte.gz", 1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"
            ),
            _mnist(
                "t10k-labels-idx1-ubyte.gz", 4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"
            ),
        ),
        "Creative Commons Attribution-Share Alike 3.0, as Keras's documentation says; copyright Y. LeCun, C. Cortes.",
        "LeCun, Bottou, Bengio, Haffner: Gradient-based learning applied to document recognition. Proc. IEEE, 1998.",
    ),
    Source(
        "mnist-m",
        "MNIST-M: MNIST digits on patches of photographs, 32x32 colour",
        (
            SourceFile(
                "mnist_m.tar.gz",
                "https://cornell.box.com/shared/static/jado7quprg6hzzdubvwzh9umr75damwi",
                "md5:859df31c91afe82e80e5012ba928f279",
                None,
                "pytorch-adapt 0.0.83, datasets/mnistm.py, and GitHub google-deepmind/dm_nevis, handlers/mnist_m.py",
                unpack=True,
                gives=tuple(
                    (f"mnist_m/{name}", name)
                    for part in ("train", "test")
                    for name in (f"mnist_m_{part}", f"mnist_m_{part}_labels.txt")
                ),
            ),
        ),
        f"{_NO_LICENCE} Made from MNIST and the photographs of BSDS500.",
        "Ganin et al.: Domain-adversarial training of neural networks. JMLR, 2016.",
        "The authors' own copy is on Google Drive (http://yaroslav.ganin.net); this one has the same checksum.",
    ),
    Source(
        "svhn",
        "SVHN: cropped digits of house numbers, 32x32 colour",
        (
            _svhn("train_32x32.mat", 182040794, "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8"),
            _svhn("test_32x32.mat", 64275384, "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b"),
        ),
        "For non-commercial use only.",
        "Netzer et al.: Reading digits in natural images with unsupervised feature learning. NIPS workshop, 2011.",
    ),
    Source(
        "usps",
        "USPS: handwritten digits of envelopes, 16x16 grey",
        (
            _usps("usps.bz2", "ec16c51db3855ca6c91edd34d0e9b197"),
            _usps("usps.t.bz2", "8ea070ee2aca1ac39742fdd1ef5ed118"),
        ),
        _NO_LICENCE,
        "Hull: A database for handwritten text recognition research. IEEE PAMI, 1994.",
        "The text form that LIBSVM publishes.",
    ),
    Source(
        "synth-digits",
        "SynthDigits: rendered digits, 32x32 colour",
        (
            SourceFile(
                "SynthDigits.zip",
                "https://drive.google.com/file/d/0B9Z4d7lAwbnTSVR1dEFSRUFxOUU/view",
                address_from="the authors' page, http://yaroslav.ganin.net",
                unpack=True,
                keep=("*synth_train_32x32.mat", "*synth_test_32x32.mat"),
                gives=(
                    ("synth_train_32x32.mat", "*/synth_train_32x32.mat"),
                    ("synth_test_32x32.mat", "*/synth_test_32x32.mat"),
                ),
                by_hand=True,
            ),
        ),
        _NO_LICENCE,
        "Ganin, Lempitsky: Unsupervised domain adaptation by backpropagation. ICML, 2015.",
        "Only on Google Drive, so it must be fetched by hand with a browser. The generator `synth-digits-like` needs "
        "no download, but is not the same data.",
        max_bytes=8 << 30,
    ),
    Source(
        "office-caltech-10",
        "Office-Caltech-10: objects in ten classes, four domains",
        tuple(_office(domain) for domain in ("amazon", "caltech", "dslr", "webcam")),
        _NO_LICENCE,
        "Saenko et al.: Adapting visual category models to new domains. ECCV, 2010. Griffin, Holub, Perona: "
        "Caltech-256 object category dataset. 2007. Gong et al.: Geodesic flow kernel for unsupervised domain "
        "adaptation. CVPR, 2012.",
        "The archives hold all classes of Office-31; the ten are unpacked. Other copies, such as FedBN's on Google "
        "Drive (https://drive.google.com/file/d/1gxhV5xRXQgC9AL4XexduH7hdxDng7bJ3/view), may be put there by hand as "
        "<domain>/<class>/*.jpg.",
    ),
    Source(
        "domainnet-10",
        "DomainNet (cleaned version): the ten classes of FedBN, six domains",
        (
            *_domainnet(
                "clipart",
                "groundtruth/",
                1270909081,
                "cd0d8f2d77a4e181449b78ed62bccf1e",
                ("train", 1443819, "b4349693a7f9c05c53955725c47ed6cb"),
                ("test", 628917, "f5ddbcfd657a3acf9d0f7da10db22565"),
            ),
            *_domainnet(
                "infograph",
                "",
                4338659804,
                "720380b86f9e6ab4805bb38b6bd135f8",
                ("train", 1683098, "379b50054f4ac2018dca4f89421b92d9"),
                ("test", 728028, "779626b50869edffe8ea6941c3755c71"),
            ),
            *_domainnet(
                "painting",
                "groundtruth/",
                3679366174,
                "1ae32cdb4f98fe7ab5eb0a351768abfd",
                ("train", 2241901, "7db0e7ca73ad9982f6e1f7f3ef372c0a"),
                ("test", 971888, "232b35dc53f26d414686ae579e38d9b5"),
            ),
            *_domainnet(
                "quickdraw",
                "",
                459920701,
                "bdc1b6f09f277da1a263389efe0c7a66",
                ("train", 5164600, "b732ced3939ac8efdd8c0a889dca56cc"),
                ("test", 2213400, "c1a828fdfe216fb109f1c0083a252c6f"),
            ),
            *_domainnet(
                "real",
                "",
                6062039589,
                "dcc47055e8935767784b7162e7c7cca6",
                ("train", 4440944, "8ebf02c2075fadd564705f0dc7cd6291"),
                ("test", 1911327, "6098816791c3ebed543c71ffa11b9054"),
            ),
            *_domainnet(
                "sketch",
                "",
                2633992926,
                "658d8009644040ff7ce30bb2e820850f",
                ("train", 1960222, "1233bd18aa9a8a200bf4cecf1c34ef3e"),
                ("test", 850581, "d8a222e4672cfd585298aa14d02ea441"),
            ),
        ),
        "Fair use notice: some of it is copyrighted; for non-commercial research and education only.",
        "Peng et al.: Moment matching for multi-source domain adaptation. ICCV, 2019.",
        "The archives hold all 345 classes; the ten of FedBN's subset are unpacked. The archives may be deleted then.",
        max_bytes=32 << 30,
    ),
    Source(
        "cifar10",
        "CIFAR-10: objects in ten classes, 32x32 colour",
        (
            SourceFile(
                "cifar-10-binary.tar.gz",
                "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
                170052171,
                f"{_TFDS}, url_checksums/cifar10.txt",
                unpack=True,
                gives=tuple(
                    (f"cifar-10-batches-bin/{name}.bin", f"cifar-10-batches-py/{name}")
                    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
                ),
            ),
        ),
        _NO_LICENCE,
        "Krizhevsky: Learning multiple layers of features from tiny images. 2009.",
    ),
    Source(
        "cifar100",
        "CIFAR-100: objects in 100 classes of 20 superclasses, 32x32 colour",
        (
            SourceFile(
                "cifar-100-binary.tar.gz",
                "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
                "sha256:58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
                168513733,
                f"{_TFDS}, url_checksums/cifar100.txt",
                unpack=True,
                gives=tuple((f"cifar-100-binary/{part}.bin", f"cifar-100-python/{part}") for part in ("train", "test")),
            ),
        ),
        _NO_LICENCE,
        "Krizhevsky: Learning multiple layers of features from tiny images. 2009.",
    ),
    Source(
        "tiny-imagenet",
        "Tiny-ImageNet: objects in 200 classes, 64x64 colour",
        (
            SourceFile(
                "tiny-imagenet-200.zip",
                "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
                "md5:90528d7ca1a48142e341f4ef8d21d0de",
                248100043,
                "avalanche-lib 0.6.0, tiny_imagenet.py (size: GitHub datasets-mila/datasets--tinyimagenet)",
                unpack=True,
                gives=tuple(
                    (f"tiny-imagenet-200/{name}", name)
                    for name in ("train", "val/images", "val/val_annotations.txt", "wnids.txt", "words.txt")
                ),
            ),
        ),
        f"{_NO_LICENCE} The images are ImageNet's; see the terms of access at https://www.image-net.org.",
        "Le, Yang: Tiny ImageNet visual recognition challenge. Stanford CS 231N, 2015.",
    ),
    Source(
        "pacs",
        "PACS: objects in seven classes, four domains",
        (
            _pacs("art_painting", "4eb7db4f3eec41719856"),
            _pacs("cartoon", "d847ac22497b4826889f"),
            _pacs("photo", "458ad21483da4a45935b"),
            _pacs("sketch", "c892ac2d94a44b1196b8"),
        ),
        _NO_LICENCE,
        "Li, Yang, Song, Hospedales: Deeper, broader and artier domain generalization. ICCV, 2017.",
        "These archives are a third party's copy. DomainBed's is on Google Drive "
        "(https://drive.google.com/uc?id=1JFr8f805nMUelQWWmfnJR3y4_SYoN5Pd); its kfold/ may be put there by hand.",
    ),
    Source(
        "agnews",
        "AG News: titles and descriptions of news in four topics",
        (
            _agnews("train.csv", "b1a00f826fdfbd249f79597b59e1dc12"),
            _agnews("test.csv", "d52ea96a97a2d943681189a97654912d"),
        ),
        "For research and any other non-commercial activity, as its readme says.",
        "Zhang, Zhao, LeCun: Character-level convolutional networks for text classification. NIPS, 2015.",
    ),
)

SOURCES: dict[str, Source] = {source.name: source for source in _ALL}

# The compact form of a source: files in the root itself.
PACKED = {
    "agnews": ("agnews_train.csv.gz", "agnews_test.csv.gz"),
    "cifar10": ("cifar10.npz",),
    "cifar100": ("cifar100.npz",),
    "mnist": ("digits_mnist.npz",),
    "mnist-m": ("digits_mnistm.npz",),
    "office-caltech-10": ("office_caltech10.npz",),
    "pacs": ("pacs_128.npz",),
    "svhn": ("digits_svhn.npz",),
    "tiny-imagenet": ("tiny_imagenet_subset.npz",),
    "usps": ("digits_usps.npz",),
}

# Datasets that use the files of other sources.
_MADE_OF = {
    "digits-five": ("mnist", "mnist-m", "svhn", "usps", "synth-digits"),
    "cifar100-super": ("cifar100",),
}
NAMES = (*_MADE_OF, *SOURCES)  # all names that `prepare` accepts


def sources_of(name: str) -> tuple[Source, ...]:
    """The sources of a dataset or of one of its domains.

    >>> [source.name for source in sources_of("digits-five")]
    ['mnist', 'mnist-m', 'svhn', 'usps', 'synth-digits']
    """
    if name not in NAMES:
        raise DataError(unknown("published dataset", name, NAMES) + " Generated datasets need no files.")
    return tuple(SOURCES[part] for part in _MADE_OF.get(name, (name,)))


def is_there(name: str, root: Path) -> bool:
    """Whether all files of a dataset are there, as published or in compact form."""
    return all(not source.lacks(root) or source.compact(root) for source in sources_of(name))


def missing(name: str, root: Path, detail: str = "") -> DataError:
    """The error for missing files: which ones, how to download them, and where to put them by hand."""
    sources = sources_of(name)
    lines = [f"{name}: files are missing in {root}. {detail}".rstrip()]
    whole = not any(source.lacks(root) for source in sources)  # the caller then misses something inside the folders
    if whole:
        folders = ", ".join(str(root / source.folder) for source in sources)
        lines.append(f"`fedprism data prepare {name}` repairs what it has unpacked. Else move {folders} away and run")
        lines.append("it then, or put there by hand:")
    elif all(file.by_hand for source in sources for file in source.files):
        archives = ", ".join(file.name for source in sources for file in source.files)
        lines.append(f"Only a browser gets them. Put them there, or {archives} and run `fedprism data prepare {name}`:")
    else:
        lines.append(f"Download them with `fedprism data prepare {name}`, or put them there by hand:")
    for source in sources:
        lacks = source.lacks(root)
        if source.compact(root) and not whole:
            continue
        for file in source.files:
            paths = [ways[0] for ways in file.expects if whole or ways[0] in lacks]
            if paths:
                lines += [f"  {root / source.folder / path}" for path in paths]
                lines.append(f"    from {file.address}{', with a browser' if file.by_hand else ''}")
    lines.append("Another folder is named by data.root or $FEDPRISM_DATA.")
    return DataError("\n".join(lines))


# --- preparing --------------------------------------------------------------------------------------------------------


def prepare(name: str, root: Path, console: Console | None = None) -> None:
    """Print a dataset's licence and citation, then download, verify and unpack its missing files."""
    sources = sources_of(name)
    console = console or Console()
    if is_there(name, root) and not os.access(root, os.W_OK):  # a shared, read-only folder
        _print(console, f"{name}: all files are there already, in {root}.")
        return
    with writing(f"{root} cannot be used"):
        root.mkdir(parents=True, exist_ok=True)
        lock = FileLock(root / ".prepare.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            _print(console, f"Another process downloads into {root}; waiting for it.")
            lock.acquire()
    by_hand: list[str] = []
    try:
        with looking():
            seen = Checksums(root)
            for source in sources:
                by_hand += _prepare(source, root, seen, console)
    except NotFetched as error:
        raise DataError(f"{error}\n{missing(name, root)}") from None
    finally:
        lock.release()
    if by_hand:
        again = f"Then run `fedprism data prepare {name}` again."
        raise DataError("\n".join((f"{name}: what is left must be fetched by hand, with a browser:", *by_hand, again)))


def _prepare(source: Source, root: Path, seen: Checksums, console: Console) -> list[str]:
    """Prepare one source, and return what must be downloaded by hand."""
    folder = root / source.folder
    size = f" ({decimal(source.size)} to download)" if source.size else ""
    _print(console, f"{source.title}{size}\n  folder: {folder}\n  licence: {source.licence}\n  cite: {source.cite}")
    if source.note:
        _print(console, f"  note: {source.note}")
    compact = source.compact(root)
    if compact and len(source.lacks(root)) == len(source.expects):
        _print(console, f"  the compact form is there, so nothing is downloaded: {', '.join(map(str, compact))}")
        return []
    remove_leftovers(folder)
    by_hand, changed = [], False
    for file in source.files:
        path = folder / file.name
        there = all(_found(folder, ways) for ways in file.expects) and not half_unpacked(path, folder)
        if there and (file.unpack or not path.exists()):
            continue
        key, existed = f"{source.name}/{file.name}", path.exists()
        known = key in seen.files
        if existed:
            changed |= _check(source, file, path, seen, console)
        elif file.by_hand:
            by_hand.append(f"  {file.address}\n    save it as {path}")
            continue
        else:
            _download(source, file, path, seen, console)
            changed = True
        if file.unpack:
            try:
                _unpack(source, file, path, console)
            except BadArchive as error:
                if file.checksum is not None or known:
                    raise DataError(f"{error}{' Remove it first.' if existed else ''}") from error
                seen.forget(key)  # later downloads must not have to match a file that cannot be unpacked
                if not existed:
                    path.unlink()
                raise DataError(f"{error} {'Remove it first.' if existed else 'It was removed.'}") from error
            changed = True
    lacks = source.lacks(root)
    if not changed and not lacks:
        _print(console, "  all files are there already.")
    elif lacks and not by_hand:
        raise DataError(
            f"{source.name}: everything was downloaded, but {', '.join(lacks)} is not in {folder}. The published "
            "archive seems to have changed; please report this, and put the files there by hand."
        )
    return by_hand


def _download(source: Source, file: SourceFile, path: Path, seen: Checksums, console: Console) -> None:
    key = f"{source.name}/{file.name}"
    expected, origin = file.checksum, f"published by {file.checksum_from}"
    if expected is None and (expected := seen.of(key)) is not None:
        origin = f"recorded at the first download in {seen.path}; remove its entry there to accept another file"
    size = f", {decimal(file.size)}" if file.size else ""
    _print(console, f"  {file.name}: downloading{size}, {file.address}")
    with byte_bar(file.name, console) as report:
        addresses = (file.address, *file.mirrors)
        address = fetch(
            addresses,
            path,
            checksum=expected,
            origin=origin,
            size=file.size,
            max_bytes=source.max_bytes,
            report=report,
        )
    _record(source, file, path, expected, address, seen, console)


def _check(source: Source, file: SourceFile, path: Path, seen: Checksums, console: Console) -> bool:
    """Verify an existing file once; return False if that was done before."""
    key = f"{source.name}/{file.name}"
    known = seen.files.get(key)
    if known and known.get("size") == path.stat().st_size and known["checksum"] == (file.checksum or known["checksum"]):
        return False
    expected = file.checksum or seen.of(key)
    if expected is not None:
        with byte_bar(f"{file.name}: checking", console) as report:
            got = digest(path, expected.partition(":")[0], report)
        if got != expected:
            whose = f"published by {file.checksum_from}" if file.checksum else f"recorded in {seen.path}"
            raise DataError(
                f"{path} is not the published file: its checksum is {got}, expected {expected} ({whose}). Move it away "
                f"and run `fedprism data prepare {source.name}` again."
            )
    _record(source, file, path, expected, "put there by hand", seen, console)
    return True


def _record(
    source: Source, file: SourceFile, path: Path, checksum: str | None, address: str, seen: Checksums, console: Console
) -> None:
    verified = file.checksum is not None
    actual = checksum or digest(path)
    seen.record(f"{source.name}/{file.name}", actual, path.stat().st_size, address, verified)
    if verified:
        _print(console, f"  {file.name}: verified, {actual} ({file.checksum_from})")
    elif checksum:
        _print(console, f"  {file.name}: unverified, but the same as at the first download, {actual}")
    else:
        _print(console, f"  {file.name}: unverified, as no checksum is published; recorded in {seen.path}: {actual}")


def _unpack(source: Source, file: SourceFile, path: Path, console: Console) -> None:
    with byte_bar(f"{file.name}: unpacking", console) as report:
        unpack(
            path,
            path.parent,
            keep=file.keep,
            max_bytes=source.max_bytes,
            max_files=source.max_files,
            report=report,
        )
    _print(console, f"  {file.name}: unpacked; it may be deleted ({decimal(path.stat().st_size)})")


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
