"""Tests, in the folders of `localq/`. Shared code is in `support`, reports and campaigns are in `tools`."""
