"""An interpreter of traced programs (jaxprs) on any values, for analysis, evaluation and rewriting."""
