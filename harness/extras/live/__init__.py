"""Live pages"""
