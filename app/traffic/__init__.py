"""Traffic between versions of one set: shares, a shadow, and the comparison of their answers."""
