"""The forms in which `pack` stores packs; a module declares its form as ``FORMAT`` (`PACK_FORMATS`)."""
