"""What is kept of an image."""

from models.ensemble import Probabilities

# A row per member, in the order in which the ensemble has them: (M, C) float32. The average is made
# of them again: to keep it too would be bytes of which other images can make better use. What the
# operator's own combine made of them is kept, after them: (M + 1, C).
Rows = Probabilities
