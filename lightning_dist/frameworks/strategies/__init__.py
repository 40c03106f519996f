"""What the strategies of Lightning and Fabric share."""
