"""Records of calls: what a rank has issued, in memory, in files, and as tables; without torch."""
