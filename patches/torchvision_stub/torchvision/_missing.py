from typing import NoReturn


def image_function(*args: object, **kwargs: object) -> NoReturn:
    """Stands for every function of torchvision that is imported but must not be called."""
    raise NotImplementedError(
        "torchvision is a stand-in on this machine, for text models only: to serve images, "
        "uninstall torchvision-stub and install the torchvision that matches your torch"
    )
