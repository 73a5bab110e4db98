"""What a step sends, holds and takes: counted in the program, predicted by formulas, measured by traces."""
