"""Where does each number live?"""
