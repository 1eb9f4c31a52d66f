"""Names, ranks, layouts and boxes: plain numbers, without torch."""
