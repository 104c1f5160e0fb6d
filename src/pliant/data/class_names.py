"""The names of the classes of published data sets, in the order of their labels."""

from collections.abc import Mapping
from string import ascii_lowercase, ascii_uppercase, digits

CLASS_NAMES: Mapping[str, tuple[str, ...]] = {
    "digits": tuple(digits),
    "mnist": tuple(digits),
    "fashion_mnist": (
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
        "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
    ),
    "notmnist": tuple("ABCDEFGHIJ"),
    "femnist": tuple(digits + ascii_uppercase + ascii_lowercase),
    "cifar10": (
        "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"
    ),
    "cifar100": (
        "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle",
        "bottle", "bowl", "boy", "bridge", "bus", "butterfly", "camel", "can", "castle",
        "caterpillar", "cattle", "chair", "chimpanzee", "clock", "cloud", "cockroach", "couch",
        "crab", "crocodile", "cup", "dinosaur", "dolphin", "elephant", "flatfish", "forest", "fox",
        "girl", "hamster", "house", "kangaroo", "keyboard", "lamp", "lawn_mower", "leopard", "lion",
        "lizard", "lobster", "man", "maple_tree", "motorcycle", "mountain", "mouse", "mushroom",
        "oak_tree", "orange", "orchid", "otter", "palm_tree", "pear", "pickup_truck", "pine_tree",
        "plain", "plate", "poppy", "porcupine", "possum", "rabbit", "raccoon", "ray", "road",
        "rocket", "rose", "sea", "seal", "shark", "shrew", "skunk", "skyscraper", "snail", "snake",
        "spider", "squirrel", "streetcar", "sunflower", "sweet_pepper", "table", "tank",
        "telephone", "television", "tiger", "tractor", "train", "trout", "tulip", "turtle",
        "wardrobe", "whale", "willow_tree", "wolf", "woman", "worm",
    ),
}  # fmt: skip


def get_class_names(dataset: str, classes: int) -> tuple[str, ...]:
    """Return the names of a data set's classes; their numbers, if it has no names.

    >>> from pliant.data.class_names import get_class_names
    >>> get_class_names("notmnist", 10)[:2], get_class_names("my_images", 2)
    (('A', 'B'), ('0', '1'))
    """
    names = CLASS_NAMES.get(dataset, ())
    return names if len(names) == classes else tuple(map(str, range(classes)))
