"""One request's way through the stages: in what order, which members, within what time."""
