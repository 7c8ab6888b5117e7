"""Tasks of a run: text, chats, preferences, labels, a teacher."""
