"""What clients may ask, and how it is answered: one file an API, on what they share.

chat, completions, responses, messages   one API: its requests, its answers, its endpoint
tokenizing   texts as tokens and back
transcript   other APIs' conversations as chat's;  blocks: a choice as they show it;  *_shapes: on the wire
service      what the endpoints share: reading, submitting, answering
requests     JSON -> checked request;  fields: the tables of what is accepted;  tools, formats: parts of them
prompts      text -> token ids, off the event loop when long
news         what the engine brings;  answers: news become answers and events;  shapes, logprobs: how they look
openapi      the documentation that the tables and the shapes make
"""
