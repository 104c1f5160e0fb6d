"""Manifests of the published data sets: files, download URLs and SHA-256 digests."""

from pliant.value import Value


class DataFile(Value, frozen=True):
    """A data file and the SHA-256 of its plain (not gzipped) content."""

    name: str
    sha256: str


class Download(Value, frozen=True):
    """A download URL and the SHA-256 of its content."""

    url: str
    sha256: str
    is_archive: bool = False

    @property
    def name(self) -> str:
        """Return the file name at the end of the URL."""
        return self.url.rpartition("/")[2]


class DatasetManifest(Value, frozen=True):
    """A named data set: its folder under the data root, its files and its downloads."""

    name: str
    title: str
    folder: str
    files: tuple[DataFile, ...]
    downloads: tuple[Download, ...]
    manual_instructions: str = ""  # how to get a set that has no URL

    def file_digest(self, name: str) -> str:
        """Return the expected SHA-256 of a file's plain content."""
        return next(file.sha256 for file in self.files if file.name == name)


# LeCun's own site is offline; torchvision uses this mirror too
_MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_FASHION_MNIST_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_NOTMNIST_URL = "https://raw.githubusercontent.com/davidflanagan/notMNIST-to-MNIST/master/"
_CIFAR_URL = "https://www.cs.toronto.edu/~kriz/"

MNIST = DatasetManifest(
    name="mnist",
    title="MNIST: 70,000 digits, 28x28 grey",
    folder="mnist",
    files=(
        DataFile(
            "train-images-idx3-ubyte",
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        ),
        DataFile(
            "train-labels-idx1-ubyte",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        ),
        DataFile(
            "t10k-images-idx3-ubyte",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        ),
        DataFile(
            "t10k-labels-idx1-ubyte",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
    ),
    downloads=(
        Download(
            _MNIST_URL + "train-images-idx3-ubyte.gz",
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        ),
        Download(
            _MNIST_URL + "train-labels-idx1-ubyte.gz",
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        ),
        Download(
            _MNIST_URL + "t10k-images-idx3-ubyte.gz",
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        ),
        Download(
            _MNIST_URL + "t10k-labels-idx1-ubyte.gz",
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
    ),
)

FASHION_MNIST = DatasetManifest(
    name="fashion_mnist",
    title="Fashion-MNIST: 70,000 pieces of clothing, 28x28 grey",
    folder="fashion-mnist",
    files=(
        DataFile(
            "train-images-idx3-ubyte",
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        ),
        DataFile(
            "train-labels-idx1-ubyte",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        ),
        DataFile(
            "t10k-images-idx3-ubyte",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        ),
        DataFile(
            "t10k-labels-idx1-ubyte",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
    ),
    downloads=(
        Download(
            _FASHION_MNIST_URL + "train-images-idx3-ubyte.gz",
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        ),
        Download(
            _FASHION_MNIST_URL + "train-labels-idx1-ubyte.gz",
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        ),
        Download(
            _FASHION_MNIST_URL + "t10k-images-idx3-ubyte.gz",
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        ),
        Download(
            _FASHION_MNIST_URL + "t10k-labels-idx1-ubyte.gz",
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        ),
    ),
)

# Bulatov's hand-cleaned letters as idx files, 1,000 per class, without a test part
NOTMNIST = DatasetManifest(
    name="notmnist",
    title="notMNIST: 10,000 letters A to J, 28x28 grey",
    folder="notmnist",
    files=(
        DataFile(
            "t10k-images-idx3-ubyte",
            "8e7f38ae95cc8f48e0986175ffc9137e5007ebcf3d8fdf6656c904eb9dab198b",
        ),
        DataFile(
            "t10k-labels-idx1-ubyte",
            "5f8e6012f2ce730700d8d05fca098bc47f71d25b890e4bec7ac5ebfd614a4001",
        ),
    ),
    downloads=(
        Download(
            _NOTMNIST_URL + "t10k-images-idx3-ubyte.gz",
            "70ae9e06201f2827e5b0a3781a3169d735dd2efc69996b9eeaee7f10ed4044d7",
        ),
        Download(
            _NOTMNIST_URL + "t10k-labels-idx1-ubyte.gz",
            "1fa03836e01c862542f8eb83463bb951bebec6fcb3efa28dad748c6b38a9021b",
        ),
    ),
)

CIFAR10 = DatasetManifest(
    name="cifar10",
    title="CIFAR-10: 60,000 photographs in 10 classes, 32x32 colour",
    folder="cifar-10-batches-bin",
    files=(
        DataFile(
            "data_batch_1.bin", "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"
        ),
        DataFile(
            "data_batch_2.bin", "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"
        ),
        DataFile(
            "data_batch_3.bin", "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"
        ),
        DataFile(
            "data_batch_4.bin", "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"
        ),
        DataFile(
            "data_batch_5.bin", "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"
        ),
        DataFile(
            "test_batch.bin", "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"
        ),
    ),
    downloads=(
        Download(
            _CIFAR_URL + "cifar-10-binary.tar.gz",
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            is_archive=True,
        ),
    ),
)

CIFAR100 = DatasetManifest(
    name="cifar100",
    title="CIFAR-100: 60,000 photographs in 100 classes, 32x32 colour",
    folder="cifar-100-binary",
    files=(
        DataFile("train.bin", "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29"),
        DataFile("test.bin", "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a"),
    ),
    downloads=(
        Download(
            _CIFAR_URL + "cifar-100-binary.tar.gz",
            "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            is_archive=True,
        ),
    ),
)

FEMNIST = DatasetManifest(
    name="femnist",
    title="FEMNIST: digits and letters of 3,550 writers, 28x28 grey",
    folder="femnist",
    files=(),  # generated by LEAF's script, so copies differ in their hashes
    downloads=(),
    manual_instructions="make it with LEAF (https://github.com/TalwalkarLab/leaf), "
    "then put its folders train and test",
)

MANIFESTS: tuple[DatasetManifest, ...] = (
    MNIST,
    FASHION_MNIST,
    NOTMNIST,
    CIFAR10,
    CIFAR100,
    FEMNIST,
)


def find_manifest(name: str) -> DatasetManifest:
    """Return the manifest of the data set with this name."""
    for manifest in MANIFESTS:
        if manifest.name == name.replace("-", "_"):
            return manifest
    raise LookupError(f"expected one of {', '.join(m.name for m in MANIFESTS)}, got {name}")
