"""From rows on disk or on the Hub to token ids and the places of the responses in them.

`rows` reads and checks rows without a tokenizer, `encoding` turns them into ids, `prepare` does both and counts what it
dropped. Neither torch nor the model is needed, so wrong data is found before anything is loaded.
"""
