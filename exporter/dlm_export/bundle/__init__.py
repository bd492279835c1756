"""The bundle on disk: a description of the network and finished files in, a folder with a
manifest out.
"""
