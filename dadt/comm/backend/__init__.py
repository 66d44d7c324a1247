"""The backend named `dadt` for torch.distributed, so that scripts can use init_process_group(backend="dadt")."""
