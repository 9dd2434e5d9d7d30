"""The audit: is the sampling of a server, of ours or another's, lossless?"""
