"""The loss over a vocabulary that is split over the ranks."""
