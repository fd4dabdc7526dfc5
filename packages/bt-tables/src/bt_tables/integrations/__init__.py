"""Other people's engines, checked by the sanitizer; nothing of theirs is imported unless asked."""
