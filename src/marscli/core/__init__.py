"""The shared core: masking, layouts, caches, the decode step, acceptance. It knows token ids, not text.

Imports torch and transformers' cache base class; nothing here imports the rest of marscli (but for `errors`).
"""
