"""What the publishers distribute: the files of each named set, their addresses and SHA-256."""

from pliant.value import Value


class File(Value, frozen=True):
    """One data file by the SHA-256 of its plain (not gzipped) content."""

    name: str
    sha256: str


class Download(Value, frozen=True):
    """One address of the publisher and the SHA-256 of what it gives."""

    url: str
    sha256: str
    is_archive: bool = False

    @property
    def name(self) -> str:
        """Return the file name at the end of the address."""
        return self.url.rpartition("/")[2]


class Published(Value, frozen=True):
    """A named set: its folder under the data root, its files and its downloads."""

    name: str
    title: str
    folder: str
    files: tuple[File, ...]
    downloads: tuple[Download, ...]
    by_hand: str = ""  # how to get it where no address can be given

    def pin(self, name: str) -> str:
        """Return the SHA-256 of a file's plain content."""
        return next(file.sha256 for file in self.files if file.name == name)


# LeCun's own address answers no more; this mirror is the one that torchvision uses
_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_NOTMNIST = "https://raw.githubusercontent.com/davidflanagan/notMNIST-to-MNIST/master/"
_CIFAR = "https://www.cs.toronto.edu/~kriz/"

MNIST = Published(
    name="mnist",
    title="MNIST: 70,000 digits, 28x28 grey",
    folder="mnist",
    files=(
        File(
            "train-images-idx3-ubyte",
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        ),
        File(
            "train-labels-idx1-ubyte",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        ),
        File(
            "t10k-images-idx3-ubyte",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        ),
        File(
            "t10k-labels-idx1-ubyte",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
    ),
    downloads=(
        Download(
            _MNIST + "train-images-idx3-ubyte.gz",
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        ),
        Download(
            _MNIST + "train-labels-idx1-ubyte.gz",
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        ),
        Download(
            _MNIST + "t10k-images-idx3-ubyte.gz",
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        ),
        Download(
            _MNIST + "t10k-labels-idx1-ubyte.gz",
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
    ),
)

FASHION_MNIST = Published(
    name="fashion_mnist",
    title="Fashion-MNIST: 70,000 pieces of clothing, 28x28 grey",
    folder="fashion-mnist",
    files=(
        File(
            "train-images-idx3-ubyte",
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        ),
        File(
            "train-labels-idx1-ubyte",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        ),
        File(
            "t10k-images-idx3-ubyte",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        ),
        File(
            "t10k-labels-idx1-ubyte",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
    ),
    downloads=(
        Download(
            _FASHION + "train-images-idx3-ubyte.gz",
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        ),
        Download(
            _FASHION + "train-labels-idx1-ubyte.gz",
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        ),
        Download(
            _FASHION + "t10k-images-idx3-ubyte.gz",
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        ),
        Download(
            _FASHION + "t10k-labels-idx1-ubyte.gz",
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        ),
    ),
)

# Bulatov's hand-cleaned letters as idx files, 1,000 a class; he gives no test part
NOTMNIST = Published(
    name="notmnist",
    title="notMNIST: 10,000 letters A to J, 28x28 grey",
    folder="notmnist",
    files=(
        File(
            "t10k-images-idx3-ubyte",
            "8e7f38ae95cc8f48e0986175ffc9137e5007ebcf3d8fdf6656c904eb9dab198b",
        ),
        File(
            "t10k-labels-idx1-ubyte",
            "5f8e6012f2ce730700d8d05fca098bc47f71d25b890e4bec7ac5ebfd614a4001",
        ),
    ),
    downloads=(
        Download(
            _NOTMNIST + "t10k-images-idx3-ubyte.gz",
            "70ae9e06201f2827e5b0a3781a3169d735dd2efc69996b9eeaee7f10ed4044d7",
        ),
        Download(
            _NOTMNIST + "t10k-labels-idx1-ubyte.gz",
            "1fa03836e01c862542f8eb83463bb951bebec6fcb3efa28dad748c6b38a9021b",
        ),
    ),
)

CIFAR10 = Published(
    name="cifar10",
    title="CIFAR-10: 60,000 photographs in 10 classes, 32x32 colour",
    folder="cifar-10-batches-bin",
    files=(
        File(
            "data_batch_1.bin", "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"
        ),
        File(
            "data_batch_2.bin", "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"
        ),
        File(
            "data_batch_3.bin", "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"
        ),
        File(
            "data_batch_4.bin", "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"
        ),
        File(
            "data_batch_5.bin", "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"
        ),
        File("test_batch.bin", "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
    ),
    downloads=(
        Download(
            _CIFAR + "cifar-10-binary.tar.gz",
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            is_archive=True,
        ),
    ),
)

CIFAR100 = Published(
    name="cifar100",
    title="CIFAR-100: 60,000 photographs in 100 classes, 32x32 colour",
    folder="cifar-100-binary",
    files=(
        File("train.bin", "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29"),
        File("test.bin", "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a"),
    ),
    downloads=(
        Download(
            _CIFAR + "cifar-100-binary.tar.gz",
            "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            is_archive=True,
        ),
    ),
)

FEMNIST = Published(
    name="femnist",
    title="FEMNIST: digits and letters of 3,550 writers, 28x28 grey",
    folder="femnist",
    files=(),  # made by a script of LEAF, so that no two copies hash alike
    downloads=(),
    by_hand="make it with LEAF (https://github.com/TalwalkarLab/leaf), "
    "then put its folders train and test",
)

SETS: tuple[Published, ...] = (MNIST, FASHION_MNIST, NOTMNIST, CIFAR10, CIFAR100, FEMNIST)


def published(name: str) -> Published:
    """Return the set of this name."""
    for found in SETS:
        if found.name == name.replace("-", "_"):
            return found
    raise LookupError(f"expected one of {', '.join(one.name for one in SETS)}, got {name}")
