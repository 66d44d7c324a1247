"""The torch.distributed backend `dadt`."""
