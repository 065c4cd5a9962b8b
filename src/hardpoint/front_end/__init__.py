"""The front end: HTTP, tokenising, detokenising, the client side of the engine. No torch here."""
