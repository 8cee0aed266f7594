"""The phases of a layer, one file each: array maths on values and refs; DMAs only through `megakernel.stream`."""
