"""Sealed records: encrypted and authenticated, in any tier."""
