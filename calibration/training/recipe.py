"""The training recipe: every hyperparameter of a run."""

from dataclasses import dataclass

from models.errors import ModelSetError

Sizes = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Recipe:
    """AdamW with a trapezoid learning rate and growing image sizes, ((epochs, pixels), ...)."""

    sizes: Sizes = ((40, 96), (10, 128))
    batch_size: int = 64
    peak_rate: float = 1e-3
    warmup_epochs: float = 2.0
    decay_fraction: float = 0.5  # of all steps, at the end: linear to 1 % (Hägele 2024)
    weight_decay: float = 0.05  # only on matrices and kernels
    label_smoothing: float = 0.1
    min_area: float = 0.3  # of a random resized crop
    ema_decay: float = 0.998
    max_gradient_norm: float = 1.0
    seed: int = 20

    @property
    def num_epochs(self) -> int:
        """The number of epochs of all sizes."""
        return sum(epochs for epochs, _ in self.sizes)

    def size_at(self, epoch: int) -> int:
        """Return the image size of an epoch, in pixels."""
        for epochs, size in self.sizes:
            if epoch < epochs:
                return size
            epoch -= epochs
        return self.sizes[-1][1]

    def rate_at(self, progress: float) -> float:
        """Return the learning rate at ``progress`` (0..1): linear up, flat, linear down."""
        warmup = self.warmup_epochs / self.num_epochs
        if progress < warmup:
            return self.peak_rate * max(progress, 1e-3) / warmup
        left = min(1.0, (1 - progress) / self.decay_fraction)
        return self.peak_rate * max(left, 0.01)


def parse_sizes(text: str) -> Sizes:
    """Parse ``40x96,10x128`` (epochs x pixels)."""
    try:
        pairs = [part.split("x") for part in text.split(",")]
        return tuple((int(epochs), int(size)) for epochs, size in pairs)
    except ValueError:
        raise ModelSetError(
            f"{text!r} is not EPOCHSxPIXELS[,EPOCHSxPIXELS...], for example 40x96,10x128"
        ) from None
