"""Floor 7: the server. Owes: checked requests, error shapes, streaming, metrics. Knows no back ends.

process      binds, starts the engine, serves, drains          (the only file that starts anything)
app          the table of routes and what stands around them
chat, completions, responses, messages   one file an API: its requests, its answers, its endpoint
transcript   other APIs' conversations as chat's;  blocks: a choice as they show it;  *_shapes: on the wire
service      what the endpoints share: reading, submitting, answering
requests     JSON -> checked request;  fields: the tables of what is accepted
tokenizing   texts as tokens and back
openapi      the documentation that the tables and the shapes make
prompts      text -> token ids, off the event loop when long
answers      news of the engine -> answers and events;  shapes: how they look on the wire
desk         who is being served, and how that ends early
"""
