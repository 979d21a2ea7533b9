"""flatten"""
