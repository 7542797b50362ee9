"""How does the state get from one layout to another?"""
