"""All experts of a layer in one launch: grouped products whose rows' ends stay on the device."""
