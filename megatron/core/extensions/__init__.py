"""Optional packages, each imported in one file here."""
