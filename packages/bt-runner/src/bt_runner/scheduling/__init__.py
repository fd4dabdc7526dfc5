"""What is computed next and which blocks it holds; nothing here knows a tensor."""
