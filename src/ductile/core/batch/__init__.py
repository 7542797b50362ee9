"""What does each rank work on, and how much does each token count?"""
