"""Analysis of recorded or planned calls: waits, causes, whether all can end; without torch."""
