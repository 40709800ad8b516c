"""The models that the server holds, and the answers that they give."""
