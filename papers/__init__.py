"""The three papers repeated, by Paceline's public interface; see README.md."""
