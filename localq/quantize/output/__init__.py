"""What a conversion writes: shards, folders, files to resume from."""
