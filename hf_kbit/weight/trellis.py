"""The kind of packed weight that has a trellis: EXL3's form, with sides of its own where these are no multiples."""
