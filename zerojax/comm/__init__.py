"""The collectives: every byte that crosses the mesh passes through here."""
