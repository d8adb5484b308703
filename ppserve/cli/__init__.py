"""The commands: they parse flags into one frozen configuration and start what it describes.

Never a decision about requests.
"""
