"""Checks of what is loaded, against libraries that are not Paceline; results are kept."""
