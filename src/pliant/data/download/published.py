"""Manifests of the known data sets: files, download URLs and SHA-256 digests."""

from pathlib import Path

from pliant.value import Value


class DataFile(Value, frozen=True):
    """A data file and the SHA-256 of its plain (not gzipped) content."""

    name: str
    sha256: str


class Download(Value, frozen=True):
    """A download URL and the SHA-256 of its content."""

    url: str
    sha256: str

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def is_archive(self) -> bool:
        return self.name.endswith(".tar.gz")


class DatasetManifest(Value, frozen=True):
    """A named data set: its folder under the data root, its files and its downloads."""

    name: str
    title: str
    folder: str
    files: tuple[DataFile, ...]
    downloads: tuple[Download, ...] = ()
    manual_instructions: str = ""  # how to get a set that has no URL


def _make_manifest(
    name: str, title: str, folder: str, *, url: str, files: str, downloads: str
) -> DatasetManifest:
    """Make a manifest from what `sha256sum` prints for the plain files and for the downloads."""
    file_words, download_words = files.split(), downloads.split()
    return DatasetManifest(
        name,
        title,
        folder,
        tuple(map(DataFile, file_words[1::2], file_words[::2])),
        tuple(map(Download, [url + word for word in download_words[1::2]], download_words[::2])),
    )


DIGITS = DatasetManifest(
    "digits",
    "MNIST: 10,000 digits, 28x28 grey, inside the package",
    str(Path(__file__).parents[1] / "embedded"),
    (
        DataFile(
            "digits.idx.xz", "19bdc258ab1631fbba9d0ff0941ce504d35d264050e18186fcdbaf4a8d313d59"
        ),
    ),
    manual_instructions="it is part of the package,",
)

# LeCun's own site is offline; torchvision uses this mirror too
MNIST = _make_manifest(
    "mnist",
    "MNIST: 70,000 digits, 28x28 grey",
    "mnist",
    url="https://ossci-datasets.s3.amazonaws.com/mnist/",
    files="""
        ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db  train-images-idx3-ubyte
        65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5  train-labels-idx1-ubyte
        0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7  t10k-images-idx3-ubyte
        ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2  t10k-labels-idx1-ubyte
    """,
    downloads="""
        440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609  train-images-idx3-ubyte.gz
        3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c  train-labels-idx1-ubyte.gz
        8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6  t10k-images-idx3-ubyte.gz
        f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6  t10k-labels-idx1-ubyte.gz
    """,
)

FASHION_MNIST = _make_manifest(
    "fashion_mnist",
    "Fashion-MNIST: 70,000 pieces of clothing, 28x28 grey",
    "fashion-mnist",
    url="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    files="""
        c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888  train-images-idx3-ubyte
        bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9  train-labels-idx1-ubyte
        5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b  t10k-images-idx3-ubyte
        0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34  t10k-labels-idx1-ubyte
    """,
    downloads="""
        3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84  train-images-idx3-ubyte.gz
        a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845  train-labels-idx1-ubyte.gz
        346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073  t10k-images-idx3-ubyte.gz
        67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5  t10k-labels-idx1-ubyte.gz
    """,
)

# Bulatov's hand-cleaned letters as idx files, 1,000 per class, without a test part
NOTMNIST = _make_manifest(
    "notmnist",
    "notMNIST: 10,000 letters A to J, 28x28 grey",
    "notmnist",
    url="https://raw.githubusercontent.com/davidflanagan/notMNIST-to-MNIST/master/",
    files="""
        8e7f38ae95cc8f48e0986175ffc9137e5007ebcf3d8fdf6656c904eb9dab198b  t10k-images-idx3-ubyte
        5f8e6012f2ce730700d8d05fca098bc47f71d25b890e4bec7ac5ebfd614a4001  t10k-labels-idx1-ubyte
    """,
    downloads="""
        70ae9e06201f2827e5b0a3781a3169d735dd2efc69996b9eeaee7f10ed4044d7  t10k-images-idx3-ubyte.gz
        1fa03836e01c862542f8eb83463bb951bebec6fcb3efa28dad748c6b38a9021b  t10k-labels-idx1-ubyte.gz
    """,
)

CIFAR10 = _make_manifest(
    "cifar10",
    "CIFAR-10: 60,000 photographs in 10 classes, 32x32 colour",
    "cifar-10-batches-bin",
    url="https://www.cs.toronto.edu/~kriz/",
    files="""
        cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5  data_batch_1.bin
        a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed  data_batch_2.bin
        bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67  data_batch_3.bin
        014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48  data_batch_4.bin
        755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add  data_batch_5.bin
        8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b  test_batch.bin
    """,
    downloads="""
        c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd  cifar-10-binary.tar.gz
    """,
)

CIFAR100 = _make_manifest(
    "cifar100",
    "CIFAR-100: 60,000 photographs in 100 classes, 32x32 colour",
    "cifar-100-binary",
    url="https://www.cs.toronto.edu/~kriz/",
    files="""
        f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29  train.bin
        d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a  test.bin
    """,
    downloads="""
        58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec  cifar-100-binary.tar.gz
    """,
)

FEMNIST = DatasetManifest(
    "femnist",
    "FEMNIST: digits and letters of 3,550 writers, 28x28 grey",
    "femnist",
    files=(),  # generated by LEAF's script, so copies differ in their hashes
    manual_instructions="make it with LEAF (https://github.com/TalwalkarLab/leaf), "
    "then put its folders train and test",
)
