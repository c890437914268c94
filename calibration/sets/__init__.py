"""Model sets made and changed: networks converted or imported, files staged and moved in whole."""
