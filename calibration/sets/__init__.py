"""Creates and changes model sets on disk: conversion, import, download, transactions."""
