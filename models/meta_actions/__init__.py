"""Meta-actions in the models room: tags as tokens, action distributions at block boundaries, warm-up synthesis."""
