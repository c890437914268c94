"""Answers images in this process, as a service would, without one."""
