"""Work on whole matrices whose elements ranks share: orthogonalization for Muon."""
