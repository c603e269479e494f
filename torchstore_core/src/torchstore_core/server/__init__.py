"""The server: controller and volumes in one torch-free process."""
