"""msplit"""
