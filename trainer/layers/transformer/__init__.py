"""The transformer: attention, feed-forward, embeddings and head, and the model that is made of them."""
